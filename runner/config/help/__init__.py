"""The text of --help: what the files of the configuration and the source of the constructors say of themselves."""
