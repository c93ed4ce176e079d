"""Why a run ends before its last step, and what follows: signals, files, the end of the job's time, later attempts."""
