"""`adaptree top`: a server's live state in the terminal."""
