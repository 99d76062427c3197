// Package upgrade replaces running servers by those of another version, as the Helm chart does for each kind of journal, while engines
// publish and routers follow. It measures how long routers got nothing, and checks that the epoch stays and nothing is lost where the journal is
// durable.
//
// By default both versions are this one under two names. With -other, one of them is another build of kvcast, such as the last release.
package upgrade
