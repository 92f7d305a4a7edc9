"""A user's own folders on Hydra's search path, before the runner's: the first file of a name counts."""

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class OwnFolder(FileConfigSource):
    """The groups of a folder; files outside of any, such as a config.yaml, would hide the runner's."""

    @staticmethod
    def scheme() -> str:
        return "own"

    def is_config(self, config_path: str) -> bool:
        return "/" in config_path and super().is_config(config_path)


class OwnFolders(SearchPathPlugin):
    """What runner.config.own_folders says at the time."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        from runner.config.own_folders import searched

        known = {element.path for element in search_path.get_path()}
        for folder in searched():
            if (path := f"own://{folder}") not in known:  # Hydra may have found this plugin by itself besides
                search_path.prepend("own", path, anchor="main")
