"""The live page: static files, and the router that serves them."""
