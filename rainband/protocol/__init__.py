"""Messages, the data plan, accepted sets, batch accounting and events. No I/O."""
