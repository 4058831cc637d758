"""All replicas: which one gets an order, retries after a failure, and the number of replicas."""
