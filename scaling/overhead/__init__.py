"""What hpczero's own Python costs a step: thread time beside plain torch, and waits for a device."""
