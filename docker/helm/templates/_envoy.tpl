{{/* Where a request goes. Takes the cluster's name. */}}
{{- define "envoy.route" -}}
cluster: {{ . }}
timeout: 0s
# Only what no server has begun: an answer that is under way is never asked for twice.
retry_policy:
  retry_on: connect-failure,refused-stream
  num_retries: 3
  host_selection_retry_max_attempts: 3
  retry_host_predicate:
    - name: envoy.retry_host_predicates.previous_hosts
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate
{{- end }}

{{/* Envoy's configuration for one pool. Takes (dict "root" $ "pool" NAME "values" POOL). */}}
{{- define "envoy.config" -}}
# GET /ready there is the probe; on loopback also what preStop asks for.
admin: { address: { socket_address: { address: 127.0.0.1, port_value: 9901 } } }
overload_manager:
  resource_monitors:
    - name: envoy.resource_monitors.global_downstream_max_connections
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig
        max_active_downstream_connections: 10000
static_resources:
  listeners:
    {{- range $protocol, $port := dict "http" 8000 "grpc" 8001 }}
    - name: {{ $protocol }}
      address: { socket_address: { address: 0.0.0.0, port_value: {{ $port }} } }
      per_connection_buffer_limit_bytes: 1048576
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: {{ $protocol }}
                codec_type: {{ eq $protocol "grpc" | ternary "HTTP2" "AUTO" }}
                # A request may wait long for its first token, and Envoy's default ends a stream that is silent for 5 min.
                stream_idle_timeout: 3600s
                request_headers_timeout: 10s
                normalize_path: true
                merge_slashes: true
                path_with_escaped_slashes_action: REJECT_REQUEST
                http_filters:
                  {{- if eq $protocol "http" }}
                  - name: envoy.filters.http.buffer
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.buffer.v3.Buffer
                      max_request_bytes: {{ $.values.maxInputBytes | int64 }}
                  {{- end }}
                  - name: envoy.filters.http.router
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
                route_config:
                  virtual_hosts:
                    - name: triton
                      domains: ["*"]
                      # Asking models and asking about them. All else, loading models above all, ends below.
                      routes:
                        {{- if eq $protocol "http" }}
                        {{- range list "path: /v2" "path_separated_prefix: /v2/health" `safe_regex: { regex: '/v2/models/[^/]+(/versions/[0-9]+)?(/(ready|config|stats|infer|generate|generate_stream))?' }` }}
                        - match: { {{ . }} }
                          route: {{- include "envoy.route" "http" | nindent 28 }}
                        {{- end }}
                        {{- else }}
                        {{- range list "ServerLive" "ServerReady" "ServerMetadata" "ModelReady" "ModelMetadata" "ModelConfig" "ModelStatistics" "ModelInfer" "ModelStreamInfer" }}
                        - match: { path: /inference.GRPCInferenceService/{{ . }} }
                          route: {{- include "envoy.route" "grpc" | nindent 28 }}
                        {{- end }}
                        - match: { path_separated_prefix: /grpc.health.v1.Health }
                          route: {{- include "envoy.route" "grpc" | nindent 28 }}
                        {{- end }}
                        - match: { prefix: / }
                          direct_response: { status: 403, body: { inline_string: "not served here\n" } }
    {{- end }}
  clusters:
    {{- range $protocol, $port := dict "http" 8000 "grpc" 8001 }}
    - name: {{ $protocol }}
      type: STRICT_DNS
      dns_refresh_rate: 5s
      connect_timeout: 2s
      # Answers differ in length by far, so turns would load servers unevenly.
      lb_policy: LEAST_REQUEST
      circuit_breakers: { thresholds: [{ max_connections: 4096, max_pending_requests: 4096, max_requests: 4096 }] }
      health_checks:
        - timeout: 2s
          interval: 5s
          unhealthy_threshold: 2
          healthy_threshold: 1
          {{- if eq $protocol "http" }}
          http_health_check: { path: /v2/health/ready }
          {{- else }}
          grpc_health_check: {}
          {{- end }}
      {{- if eq $protocol "grpc" }}
      typed_extension_protocol_options:
        envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
          "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
          explicit_http_config: { http2_protocol_options: {} }
      {{- end }}
      load_assignment:
        cluster_name: {{ $protocol }}
        endpoints:
          - lb_endpoints:
              - endpoint: { address: { socket_address: { address: {{ include "pool.name" $ }}-pods, port_value: {{ $port }} } } }
    {{- end }}
{{- end }}
