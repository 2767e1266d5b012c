"""Plans and a cluster in, step time and memory out: what a job would do, without running it."""
