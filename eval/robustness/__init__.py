"""What a service must stand: load beyond what it can do, clients that leave, nonsense, kills."""
