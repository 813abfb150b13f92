"""One address for several replicas: a request goes to one of them, and its stream survives the end of that one."""
