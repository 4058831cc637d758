// Shows the service's own description of its API.
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  // Swagger's own validator is a web service.
  validatorUrl: null,
});
