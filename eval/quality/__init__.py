"""The quality of pictures: the task, its judges, and quality against speed."""
