"""The TreeFlash kind."""
