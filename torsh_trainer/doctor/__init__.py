"""Why a job does not start, or is slow: checks of this host, of logs, and of launch scripts."""
