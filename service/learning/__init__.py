"""Assembly of servers and trainers that learn, and commands that train, inspect, export and adapt drafters."""
