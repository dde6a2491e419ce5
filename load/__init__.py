"""The load lab: sends traffic to a server, records every answer and says what it means."""
