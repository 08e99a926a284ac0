"""The page that shows a job: `picture` says what is drawn, `document` makes the page of it."""
