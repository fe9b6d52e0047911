// kube-router's controller of NetworkPolicies, which k3s embeds, without the rest of kube-router.
package main

import (
	"fmt"
	"os"
	"sync"

	"github.com/cloudnativelabs/kube-router/v2/pkg/controllers/netpol"
	"github.com/cloudnativelabs/kube-router/v2/pkg/healthcheck"
	"github.com/cloudnativelabs/kube-router/v2/pkg/options"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

func main() {
	// The kubeconfig, the Node's name, the range of Services.
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(kubeconfig, node, services string) error {
	config := options.NewKubeRouterConfig()
	config.EnableIPv4 = true
	config.HostnameOverride = node
	config.ClusterIPCIDRs = []string{services}
	rest, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(rest)
	if err != nil {
		return err
	}
	iptables, ipset, err := netpol.NewIPTablesHandlers(config)
	if err != nil {
		return err
	}
	never := make(chan struct{})
	factory := informers.NewSharedInformerFactory(client, 0)
	pods := factory.Core().V1().Pods().Informer()
	policies := factory.Networking().V1().NetworkPolicies().Informer()
	namespaces := factory.Core().V1().Namespaces().Informer()
	factory.Start(never)
	factory.WaitForCacheSync(never)
	controller, err := netpol.NewNetworkPolicyController(
		client, config, pods, policies, namespaces, &sync.Mutex{}, iptables, ipset)
	if err != nil {
		return err
	}
	for informer, handler := range map[cache.SharedIndexInformer]cache.ResourceEventHandler{
		pods: controller.PodEventHandler, policies: controller.NetworkPolicyEventHandler, namespaces: controller.NamespaceEventHandler,
	} {
		if _, err := informer.AddEventHandler(handler); err != nil {
			return err
		}
	}
	alive := make(chan *healthcheck.ControllerHeartbeat)
	go func() {
		for range alive {
		}
	}()
	var running sync.WaitGroup
	running.Add(1)
	controller.Run(alive, never, &running)
	return nil
}
