"""Child processes: their environment, process group, log and end; and waits that log a line every minute."""
