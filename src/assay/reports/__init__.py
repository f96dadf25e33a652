"""Reports as HTML pages and Markdown. Runs nothing."""
