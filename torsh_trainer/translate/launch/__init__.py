"""Launch files and launch lines: who starts what with which arguments, as a native job."""
