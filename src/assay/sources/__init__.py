"""Source files of users and artifacts: running them as modules, finding the files that they need, and trust."""
