"""What travels and what is counted: messages, the data plan, accepted sets, events. No I/O."""
