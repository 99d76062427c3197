package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// namespaceFile has the namespace of the pod that kvcast runs in.
const namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// Client is a connection to an API server.
type Client struct {
	// Namespace is the namespace of the pod that kvcast runs in, or of the kubeconfig's context.
	Namespace string

	rest *rest.RESTClient
}

// CloseIdleConnections closes the connections that no request uses.
func (c *Client) CloseIdleConnections() { utilnet.CloseIdleConnectionsFor(c.rest.Client.Transport) }

// NewClient returns a client with the configuration of a kubeconfig file. If kubeconfig is empty, it is that of the pod
// that kvcast runs in, or else the file in $KUBECONFIG or ~/.kube/config. NewClient does not connect.
func NewClient(kubeconfig string) (*Client, error) {
	c, namespace, err := loadConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	// A scheme of core/v1 alone: that of package kubernetes/scheme links every API group.
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("register pods: %w", err)
	}
	c.GroupVersion, c.APIPath = &corev1.SchemeGroupVersion, "/api"
	c.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	c.UserAgent = "kvcast"
	c.WarningHandlerWithContext = rest.NoWarnings{}
	client, err := rest.RESTClientFor(c)
	if err != nil {
		return nil, fmt.Errorf("use Kubernetes client configuration: %w", err)
	}
	return &Client{Namespace: namespace, rest: client}, nil
}

// Pods returns the pods of a namespace.
func (c *Client) Pods(namespace string) Pods { return pods{c.rest, namespace} }

// pods implements Pods. Package gentype of client-go would do the same, and links client-go's fakes and OpenAPI: 4 MB.
type pods struct {
	client    *rest.RESTClient
	namespace string
}

func (p pods) List(ctx context.Context, o metav1.ListOptions) (*corev1.PodList, error) {
	list := new(corev1.PodList)
	return list, p.get(o).Do(ctx).Into(list)
}

func (p pods) Watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	o.Watch = true
	return p.get(o).Watch(ctx)
}

func (p pods) get(o metav1.ListOptions) *rest.Request {
	return p.client.Get().UseProtobufAsDefaultIfPreferred(true).NamespaceIfScoped(p.namespace, p.namespace != metav1.NamespaceAll).
		Resource("pods").VersionedParams(&o, metav1.ParameterCodec)
}

// loadConfig returns a client configuration and its namespace.
func loadConfig(kubeconfig string) (*rest.Config, string, error) {
	if kubeconfig == "" {
		c, err := rest.InClusterConfig()
		switch {
		case err == nil:
			namespace, err := os.ReadFile(namespaceFile)
			if err != nil {
				return nil, "", fmt.Errorf("read the namespace of this pod: %w", err)
			}
			return c, strings.TrimSpace(string(namespace)), nil
		case !errors.Is(err, rest.ErrNotInCluster):
			return nil, "", fmt.Errorf("read the Kubernetes service account of this pod: %w; want automountServiceAccountToken: true", err)
		}
	}
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = kubeconfig
	file := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil)
	c, err := file.ClientConfig()
	if clientcmd.IsEmptyConfig(err) {
		if kubeconfig != "" {
			return nil, "", fmt.Errorf("kubeconfig %s names no cluster: want a context with a cluster", kubeconfig)
		}
		return nil, "", errors.New("no Kubernetes client configuration: want to run in a pod, a kubeconfig file at $KUBECONFIG or ~/.kube/config, or the setting kubeconfig")
	}
	if err != nil {
		return nil, "", fmt.Errorf("read kubeconfig: %w", err)
	}
	namespace, _, err := file.Namespace()
	if err != nil {
		return nil, "", fmt.Errorf("read kubeconfig: %w", err)
	}
	return c, namespace, nil
}

// AllNamespaces stands for all namespaces in a list of namespaces.
const AllNamespaces = "*"

// ValidSelector reports whether a text is a label selector that does not match every pod.
func ValidSelector(text string) bool {
	selector, err := labels.Parse(text)
	return err == nil && !selector.Empty()
}

// ValidPool reports whether a text may be the name of an InferencePool.
func ValidPool(text string) bool { return len(validation.IsDNS1123Subdomain(text)) == 0 }

// ValidNamespace reports whether a text names a namespace, or is AllNamespaces.
func ValidNamespace(text string) bool {
	return text == AllNamespaces || len(validation.IsDNS1123Label(text)) == 0
}

// ValidLabel reports whether a text is the key of a label.
func ValidLabel(text string) bool { return len(validation.IsQualifiedName(text)) == 0 }
