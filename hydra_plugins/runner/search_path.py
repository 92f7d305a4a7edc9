"""The custom directories on Hydra's search path, before the built-in options."""

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from runner.config.custom_dirs import searched_dirs


class CustomDirSource(FileConfigSource):
    """The groups of a custom directory; a file outside of any group, such as config.yaml, would hide the runner's."""

    @staticmethod
    def scheme() -> str:
        return "custom"

    def is_config(self, config_path: str) -> bool:
        return "/" in config_path and super().is_config(config_path)


class CustomDirs(SearchPathPlugin):
    """Prepends `searched_dirs()` to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        known = {element.path for element in search_path.get_path()}
        for directory in searched_dirs():
            if (path := f"custom://{directory}") not in known:  # Hydra may also have found this plugin by itself
                search_path.prepend("custom", path, anchor="main")
