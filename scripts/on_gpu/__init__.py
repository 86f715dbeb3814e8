"""What `make gpu` is made of: the wheels that it carries, jobs with limits, and what each job runs."""
