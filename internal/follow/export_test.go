package follow

// TurnBytes is the maximum number of bytes that a Follower applies while readers wait.
const TurnBytes = turnBytes
