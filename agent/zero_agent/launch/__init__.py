"""`zero-ctl launch`: start an agent on every host of a hostfile, as DeepSpeed's launcher does.

`arguments` reads the command line, `hosts` the hostfile and its filters, `environment` what is
exported; `plan` puts them into one record, `runners` makes commands of it, and `session` runs
these until the job has ended.
"""
