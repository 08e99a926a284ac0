"""The page that shows a job: `document` makes it, of the files beside it."""
