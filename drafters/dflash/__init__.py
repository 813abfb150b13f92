"""The DFlash kind, and the forwards of kinds whose committed positions run no layer."""
