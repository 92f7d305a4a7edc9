"""What was typed: checked against what the configuration and the constructors offer, and explained when it is wrong."""
