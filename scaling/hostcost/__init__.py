"""Host cost: what a step costs the host of one rank of a large job, against communicators that move nothing."""
