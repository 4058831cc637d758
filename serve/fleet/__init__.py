"""All replicas as one: which one gets an order, what follows when one dies, how many run."""
