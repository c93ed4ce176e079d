"""What tests share: agreement over ranks, real MPI jobs, a watchdog, the processes that a test started."""
