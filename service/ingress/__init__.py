"""One address for several replicas: requests go to one of them, and streams outlive it."""
