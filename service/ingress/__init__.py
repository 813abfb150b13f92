"""One address for several replicas: forwards each request to a replica, and resumes its stream on another if that one
fails."""
