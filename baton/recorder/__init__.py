"""A flight recorder: what deciding code was asked and what it answered, in a ring, and the file that it becomes."""
