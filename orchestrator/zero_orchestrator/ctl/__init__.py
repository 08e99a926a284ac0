"""What a user does with a job: `zero-ctl`, what it shows, what it asks for."""
