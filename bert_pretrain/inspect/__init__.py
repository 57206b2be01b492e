"""`inspect`: what a data folder holds, whether it is what its configuration says, and how to show it."""
