"""The custom directories on Hydra's search path, before the built-in options."""

from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin

from runner.config.custom_dirs import searched_dirs
from runner.config.diagnostics.option_files import describe, ignored_file, read_mapping_node
from runner.config.texts import keep_text_of_file


class CustomDirSource(FileConfigSource):
    """The groups of a custom directory; a file outside of any group, such as config.yaml, would hide the runner's."""

    @staticmethod
    def scheme() -> str:
        return "custom"

    def is_config(self, config_path: str) -> bool:
        """Return True for the file of an option. Raise ConfigLoadError if its suffix is .yml, which Hydra ignores."""
        if "/" not in config_path:
            return False
        if problem := ignored_file([self.path], config_path):
            raise ConfigLoadError(problem)
        return super().is_config(config_path)

    def load_config(self, config_path: str) -> ConfigResult:
        """Read the file of an option. Raise ConfigLoadError, one line with the file and the line that is wrong."""
        file = Path(self.path, self._normalize_file_name(config_path))
        try:
            node = read_mapping_node(file)
        except (OSError, ValueError) as error:
            raise ConfigLoadError(str(error)) from None
        try:
            result = super().load_config(config_path)
        except Exception as error:  # of Hydra's header, of YAML's constructor, or of OmegaConf
            raise ConfigLoadError(describe(file, error)) from None
        if node is not None and result.header["package"] == "_global_":
            keep_text_of_file(node, result.config)
        return result


class CustomDirs(SearchPathPlugin):
    """Prepends `searched_dirs()` to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        known = {element.path for element in search_path.get_path()}
        for directory in searched_dirs():
            if (path := f"custom://{directory}") not in known:  # Hydra may also have found this plugin by itself
                search_path.prepend("custom", path, anchor="main")
