"""All replicas as one: who gets an order, what follows when one dies, how many there are."""
