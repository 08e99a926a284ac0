"""`zero-ctl launch`: start an agent on every host of a hostfile, as DeepSpeed's launcher does.

`command` parses the command line, `hosts` the hostfile and its filters, `environment` the exported
variables; `plan` puts them into one record, `runners` makes commands from it, and `session` runs
the commands until the job has ended.
"""
