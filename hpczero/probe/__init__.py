"""The probe: what this machine computes, sends and stores per second, measured with all ranks at once."""
