"""Other hosts: how users name them, how ssh reaches them, and what a host says of itself."""
