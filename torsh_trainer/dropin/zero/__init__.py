"""What stands behind the modules that a script under drop-in sees as DeepSpeed's."""
