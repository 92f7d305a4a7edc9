"""The text of --help, from the configuration files and their comments."""
