"""The machine: what it has, what others have, and how processes start and end on it."""
