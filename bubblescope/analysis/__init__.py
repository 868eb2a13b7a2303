"""What was measured, carved exactly: windows, operations, idle time, gaps, phases. Nothing is replayed here."""
