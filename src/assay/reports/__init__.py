"""Reports for people: HTML pages and Markdown. Runs nothing."""
