// Package observe has tests of what operators see of kvcast serve: metrics and their documentation, traces, the dashboard,
// and the alert rules.
package observe
