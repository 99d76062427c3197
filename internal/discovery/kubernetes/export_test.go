package kubernetes

import "k8s.io/client-go/rest"

// REST returns the REST client that c uses, so that tests can create and change objects.
func (c *Client) REST() *rest.RESTClient { return c.rest }
