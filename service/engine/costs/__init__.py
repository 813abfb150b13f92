"""What steps cost on this machine: predicted, corrected while serving, measured at start-up."""
