"""A run's directory: claimed by one job, filled, reported on, and the trained model made of it. In: settings and
events. Out: files that people read, and that another run resumes from.
"""
