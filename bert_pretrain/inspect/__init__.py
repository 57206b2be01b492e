"""`inspect`: show a data folder and check it against its configuration."""
